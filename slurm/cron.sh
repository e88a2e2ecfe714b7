# A cron made of Slurm jobs, for sites that have no other. To be sourced by cron-hourly.slurm and cron-daily.slurm:
#
#     cron NAME SECONDS OTHER OTHER_SECONDS
#
# runs each *.slurm of $CRON/cron.NAME as a job, and comes back in SECONDS. It submits itself before all else, so that nothing that
# fails later ends it, and looks after OTHER: if that has not run for three of its periods, it says so and submits it.
# What they say is in $CRON/*.out. $CRON_SECONDS, where it is set, is SECONDS for both (to try it out).

cron() {
    local name=$1 seconds=${CRON_SECONDS:-$2} other=$3 other_seconds=${CRON_SECONDS:-$4} script age
    : "${CRON:?the folder that holds cron.hourly/ and cron.daily/: export CRON=...}"
    [[ -d $CRON/cron.$name ]] || { echo "$CRON/cron.$name is no folder; make it, and link the scripts to run into it" >&2; exit 2; }

    exec >>"$CRON/cron-$name.out" 2>&1
    echo "[$(date '+%Y-%m-%d %H:%M:%S')] cron-$name, job $SLURM_JOB_ID"
    # Another one that waits already is the one that comes back.
    if [[ -z $(squeue --noheader --me --name="cron-$name" --states=PENDING) ]]; then
        sbatch --output="$CRON/%x.out" --begin="now+$seconds" "slurm/cron-$name.slurm"
    fi
    date +%s >"$CRON/cron.$name.last-run"

    if [[ -d $CRON/cron.$other ]]; then
        age=$(($(date +%s) - $(cat "$CRON/cron.$other.last-run" 2>/dev/null || echo 0)))
        if ((age > 3 * other_seconds)) && [[ -z $(squeue --noheader --me --name="cron-$other") ]]; then
            echo "[$(date '+%Y-%m-%d %H:%M:%S')] ALERT: cron-$other was lost: it is in no queue, and last ran $age s ago; submitted again"
            sbatch --output="$CRON/%x.out" "slurm/cron-$other.slurm"
        fi
    fi

    for script in "$CRON/cron.$name"/*.slurm; do
        [[ -e $script ]] || { echo "nothing to run in $CRON/cron.$name"; break; }
        sbatch --output="$CRON/%x.out" "$script" || echo "[$(date '+%Y-%m-%d %H:%M:%S')] ALERT: $script could not be submitted"
    done
}
