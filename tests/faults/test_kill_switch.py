"""The kill switch on a file system that fails for a while."""

from pathlib import Path

from faults.launches import NewJob

UNKNOWN = "cannot be looked for (File name too long)"


def test_error_at_the_kill_switch_does_not_end_the_run(new_job: NewJob, tmp_path: Path) -> None:
    """The folder of the kill switch is a link to a name that the file system refuses."""
    folder = tmp_path / "folder"
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(folder)
    broken = tmp_path / "broken"
    broken.symlink_to(tmp_path / ("x" * 300))
    job = new_job("job", f"--train-iters 300000 --kill-switch-path {link / 'stop'}", ranks=2)
    launch = job.launch()
    launch.wait_for_line("iteration        2/")
    broken.replace(link)
    launch.wait_for_line(UNKNOWN)
    seen = max(job.curve())
    launch.wait_for(lambda: max(job.curve()) > seen + 3, "further iterations")
    assert launch.output().count(UNKNOWN) == 1
    broken.symlink_to(folder)
    broken.replace(link)
    launch.wait_for_line("can be looked for again")
    (folder / "stop").touch()
    assert launch.codes() == [0, 0], launch.all_output()
    assert "Detected kill switch" in launch.output()
    job.check(max(job.curve()))


def test_kill_switch_that_cannot_be_looked_for_is_refused_at_the_start(
    new_job: NewJob, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / ("x" * 300))
    job = new_job("job", f"--kill-switch-path {link / 'stop'}", ranks=2)
    assert UNKNOWN in job.fail()
    assert not job.folder.exists()
