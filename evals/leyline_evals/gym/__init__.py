"""debug-gym's mini_nightmare tasks: environments, scripted agents, recordings and the arms experiment.

| module | holds | needs debug-gym |
|---|---|---|
| ``tasks`` | task names and the default eight | no |
| ``script`` | the scripted agents (``scripts/*.toml``) | no |
| ``recording`` | recorded trajectories, loading and replaying them | no |
| ``arms`` | arm name -> session settings | no |
| ``results``, ``summary`` | the files of an experiment, and what they come to | no |
| ``confine``, ``processes`` | keeping a process inside one folder; children and their end | no |
| ``data``, ``env``, ``stable`` | offline environments, and the same text on every run | yes |
| ``recorder`` | script + environment -> recording | yes |
| ``llm``, ``replies``, ``agent``, ``prompt`` | the seam between debug-gym's loop and a session | yes |
| ``run``, ``worker`` | tasks x arms x seeds, parallel and resumable | yes |
| ``testing`` | a fake OpenAI-compatible server and a session that edits | no |
"""

from leyline_evals.gym.recording import Recording, Turn, load_recording, recorded_tasks
from leyline_evals.gym.tasks import ALL_TASKS, DEFAULT_TASKS, OFFLINE_TASKS, UnknownTaskError, check_tasks

__all__ = [
    "ALL_TASKS",
    "DEFAULT_TASKS",
    "OFFLINE_TASKS",
    "Recording",
    "Turn",
    "UnknownTaskError",
    "check_tasks",
    "load_recording",
    "recorded_tasks",
]
