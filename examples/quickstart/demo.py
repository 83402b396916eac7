"""`make demo`: the whole of multi-teacher on-policy distillation on this machine, in minutes.

    python -m examples.quickstart.demo [seed=0]

    1 world        prompts, tokenizer, a random Qwen3-MoE               examples/quickstart/world.py
    2 checkpoints  the SFT policy and its nine teachers                 examples/quickstart/make_checkpoints.py
    3 train        nine teachers into one student                       mopd train examples/quickstart/mopd.yaml
    4 eval         the 3 x 3 table, summary.json, report.html           mopd eval, mopd report

Each stage is what a user would type. A second call continues where the first one stopped; another seed moves the old run
aside to runs/quickstart-seedN.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from megatron_mopd.cli import guarded, main as mopd
from megatron_mopd.config import load_config
from megatron_mopd.errors import UserError
from megatron_mopd.launch import launch

CONFIG = "examples/quickstart/mopd.yaml"
