# A cron made of Slurm jobs, for sites that have no other. cron-hourly.slurm and cron-daily.slurm
# source this file.
#
#     cron NAME SECONDS OTHER OTHER_SECONDS
#
# This function submits each *.slurm of $CRON/cron.NAME as a job, and runs again after SECONDS. It
# submits itself first, so that a later failure does not end the cycle. If OTHER has not run for
# three of its periods, the function prints an ALERT and submits OTHER. If OTHER has never run, it is
# submitted without an ALERT. The output is in $CRON/*.out. If $CRON_SECONDS is set, it replaces both periods, for a trial.

cron() {
    local name=$1 seconds=${CRON_SECONDS:-$2} other=$3 other_seconds=${CRON_SECONDS:-$4} script last age pending
    : "${CRON:?is not set. Give the folder with cron.hourly/ and cron.daily/: export CRON=...}"
    [[ -d $CRON/cron.$name ]] || { echo "$CRON/cron.$name is not a folder. Create it, and link the scripts to run into it." >&2; exit 2; }

    exec >>"$CRON/cron-$name.out" 2>&1
    echo "[$(date '+%Y-%m-%d %H:%M:%S')] cron-$name, job $SLURM_JOB_ID"
    # If another one is pending already, it continues the cycle. A second one would run everything
    # twice. If squeue fails, a job is submitted, because without a pending job the cycle would end.
    # If there are two jobs then, the first one finds the second one pending and submits no other.
    if ! pending=$(squeue --noheader --me --name="cron-$name" --states=PENDING); then
        echo "[$(date '+%Y-%m-%d %H:%M:%S')] ALERT: squeue failed; cron-$name is submitted again, and may run one time too many"
        pending=""
    fi
    if [[ -z $pending ]]; then
        sbatch --output="$CRON/%x.out" --begin="now+$seconds" "slurm/cron-$name.slurm"
    fi
    date +%s >"$CRON/cron.$name.last-run"

    # A site may clear its queue. Then only the other cron can submit this one again.
    if [[ -d $CRON/cron.$other ]]; then
        last=$(cat "$CRON/cron.$other.last-run" 2>/dev/null || echo 0)
        age=$(($(date +%s) - last))
        # If squeue fails, it is unknown whether the other cron was lost. The next run checks again.
        if ((age > 3 * other_seconds)) && pending=$(squeue --noheader --me --name="cron-$other") && [[ -z $pending ]]; then
            if ((last == 0)); then
                echo "[$(date '+%Y-%m-%d %H:%M:%S')] cron-$other has not run yet; submitted"
            else
                echo "[$(date '+%Y-%m-%d %H:%M:%S')] ALERT: cron-$other was lost: it is not in the queue, and last ran $age s ago; submitted again"
            fi
            sbatch --output="$CRON/%x.out" "slurm/cron-$other.slurm"
        fi
    fi

    for script in "$CRON/cron.$name"/*.slurm; do
        # Without a match bash leaves the pattern itself in $script.
        [[ -e $script ]] || { echo "nothing to run in $CRON/cron.$name"; break; }
        sbatch --output="$CRON/%x.out" "$script" || echo "[$(date '+%Y-%m-%d %H:%M:%S')] ALERT: $script could not be submitted"
    done
}
