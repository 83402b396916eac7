"""Does a teacher speak the student's language? Read from JSON files alone, before any model.

A teacher scores the student's token ids, so both must have the same vocabulary size and the same token for every id.
"""

from __future__ import annotations

from pathlib import Path

from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import read_hf_config, read_token_map


def check_same_language(student: Path, teacher: Path, key: str) -> None:
    """Refuse a teacher with another vocabulary size or another token for any id, naming the first one."""
    student_size = read_hf_config(student, "student.checkpoint")["vocab_size"]
    teacher_size = read_hf_config(teacher, key)["vocab_size"]
    if student_size != teacher_size:
        raise UserError(
            f"{key}: vocabulary of {teacher_size} tokens, the student's has {student_size}; they must be the same"
        )
    ours, theirs = read_token_map(student, "student.checkpoint"), read_token_map(teacher, key)
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise UserError(
                f"{key}: another tokenizer: id {index} is {theirs.get(index)!r}, the student's is {ours.get(index)!r}"
            )
