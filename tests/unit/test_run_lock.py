"""One run at a time in a run folder, and no rank without its launcher."""

import subprocess
import sys
import textwrap

import pytest

from megatron_mopd.errors import UserError
from megatron_mopd.run_lock import locked


def test_a_second_run_in_the_folder_is_refused_until_the_first_has_ended(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(UserError, match="another run is at work in"):
        locked(tmp_path / "run", wait_s=0.2).__enter__()
    with locked(tmp_path / "run"):
        pass


def test_a_rank_ends_when_its_launcher_is_killed(tmp_path):
    rank = "import time; from megatron_mopd.ranks import *; end_with_launcher(); print(1, flush=True); time.sleep(60)"
    launcher = textwrap.dedent(f"""
        import os, subprocess, sys
        subprocess.run([sys.executable, "-c", {rank!r}], env={{**os.environ, "TORCHELASTIC_RUN_ID": "x"}})
    """)
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.communicate(timeout=20)  # the rank holds the pipe open: its end is the end of the output
