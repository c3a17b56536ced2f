"""Runs a snippet in a fresh Python process: other environment variables, other imports."""

import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(code: str, *, without: tuple[str, ...] = (), **environment: str) -> str:
    """Standard output of ``code``; ``without`` names variables that the process must not see."""
    env = {k: v for k, v in os.environ.items() if k not in without} | environment
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()
