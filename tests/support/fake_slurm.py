"""A Slurm of one machine: sbatch, srun, scontrol and sacct as far as they are needed here.

`sbatch FILE` runs the file at once, once for each task of its array; `scontrol requeue JOB` runs it again when the job
has ended.
"""

import os
import stat
import sys
from pathlib import Path

COMMANDS = {
    "sbatch": """
import os, re, subprocess, sys
from pathlib import Path

folder, file = Path({folder!r}), sys.argv[-1]
text = Path(file).read_text()
(folder / "job.sh").write_text(text)
array = re.search(r"--array=(\\d+)-(\\d+)", text)
for task in range(int(array[1]), int(array[2]) + 1) if array else [None]:
    name = "7" if task is None else f"7_{{task}}"
    slurm = {{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}}
    slurm |= {{"SLURM_NODEID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "1"}}
    if task is not None:
        slurm |= {{"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}}
    loop = f"while :; do bash job.sh >> log-{{name}} 2>&1; [ -e requeue-{{name}} ] || break; rm requeue-{{name}}; done"
    quiet = {{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}}
    subprocess.Popen(["bash", "-c", loop], cwd=folder, env={{**os.environ, **slurm}}, **quiet)
print("Submitted batch job 7")
""",
    "srun": """
import os, sys

command = sys.argv[1:]
while command[0].startswith("-"):
    command = command[1:] if "=" in command[0] or command[0] == "--unbuffered" else command[2:]
os.execvp(command[0], command)
""",
    "scontrol": """
import sys
from pathlib import Path

assert sys.argv[1] == "requeue"
(Path({folder!r}) / f"requeue-{{sys.argv[2]}}").touch()
""",
    "sacct": """
print("JobID|State|NodeList")
print("7|RUNNING|here")
""",
}


def install(folder: Path) -> str:
    """Return a PATH with these commands before all others; jobs run in the folder."""
    places = folder / "bin"
    places.mkdir(parents=True)
    for name, code in COMMANDS.items():
        (places / name).write_text(
            f"#!{sys.executable}\n{code.format(folder=str(folder)) if '{folder' in code else code}"
        )
        (places / name).chmod(0o755 | stat.S_IXUSR)
    return f"{places}:{os.environ['PATH']}"
