"""Who a teacher is, and whether it speaks the student's language: from files alone, before any model.

A teacher scores the student's token ids after prompts that the student's template rendered, so it must have the same
token for every id and the same chat template. Its vocabulary may be wider or narrower by padding rows alone: rows
of the output layer beyond the last token of the tokenizer. Scorers normalise over all `vocab_size` rows of the
teacher, its padding included, as it was trained: a trained padding row has next to no probability; what an untrained
one takes is taken from all tokens alike, and shows as reverse KL in the same-origin gate. A student that samples one
of its own padding rows beyond the teacher's has sampled what no teacher can score.

A fingerprint is stamped on every reply of a teacher service and kept in every checkpoint of a run. Promises
(tests/unit/test_identity_contract.py): an update of any tensor, another token, template or rope_theta gives another
one; how tensors are split into files, and the order of the files, do not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

from megatron_mopd.errors import UserError
from megatron_mopd.hf_folder import StoredTensor, read_chat_template, read_hf_config, read_tensors, read_token_map

PAGE_BYTES, MIN_PAGES, BYTES_PER_PAGE = 4096, 4, 1 << 24
"""Of a tensor are hashed: all bytes if they fill at most MIN_PAGES pages, else MIN_PAGES evenly spaced pages, first and
last included, and of larger ones a page per BYTES_PER_PAGE. An optimizer step changes far more than one value in ten
thousand of a tensor; an edit of a few values by hand may go unseen. A trillion parameters take some 300,000 reads."""
NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype")
"""Fields of config.json that do not say what the model computes; tensors carry their own dtypes."""
READERS = 16


@dataclass(frozen=True)
class Fingerprint:
    """Hashes in hex. `str()` is one short hash of them all."""

    weights: str
    tokenizer: str
    template: str
    architecture: str
    vocab_size: int

    def __str__(self) -> str:
        return _digest(map(str, astuple(self)))[:16]


def fingerprint(folder: Path, megatron_checkpoint: Path | None = None, key: str = "checkpoint") -> Fingerprint:
    """Of a Hugging Face folder; with `megatron_checkpoint` (a Megatron distributed checkpoint) the weights are those
    files. `key` names the option in errors. Raises UserError for what is no such folder."""
    config = read_hf_config(folder, key)
    stored = read_tensors(folder, key) if megatron_checkpoint is None else _files_of(megatron_checkpoint, key)
    return Fingerprint(
        weights=_weights_digest(stored, key),
        tokenizer=_digest(f"{index} {token}" for index, token in sorted(read_token_map(folder, key).items())),
        template=_digest([read_chat_template(folder, key)]),
        architecture=_digest(
            [json.dumps({k: v for k, v in config.items() if k not in NOT_ARCHITECTURE}, sort_keys=True)]
        ),
        vocab_size=config["vocab_size"],
    )


def check_same_language(student: Path, teacher: Path, key: str) -> str:
    """What to say of the teacher's padding rows, "" if it has as many as the student.

    Raises UserError for another token, naming the first one; for an output layer without a row for each token; for
    another chat template, naming the first line.
    """
    student_rows = read_hf_config(student, "student.checkpoint")["vocab_size"]
    rows = read_hf_config(teacher, key)["vocab_size"]
    ours, theirs = read_token_map(student, "student.checkpoint"), read_token_map(teacher, key)
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise UserError(
                f"{key}: another tokenizer: id {index} is {theirs.get(index)!r}, the student's is {ours.get(index)!r}"
            )
    if (num_tokens := max(theirs, default=-1) + 1) > rows:
        raise UserError(
            f"{key}: its tokenizer has ids up to {num_tokens - 1} ({theirs[num_tokens - 1]!r}), its vocab_size is "
            f"{rows}; use the tokenizer of this model"
        )
    _check_same_template(read_chat_template(student, "student.checkpoint"), read_chat_template(teacher, key), key)
    if rows == student_rows:
        return ""
    return f"{key}: {rows} vocabulary rows, the student's {student_rows}; those beyond {num_tokens} tokens are padding"


def _check_same_template(ours: str, theirs: str, key: str) -> None:
    """How lines end, and whether the last one does, is nothing to the template engine."""
    lines = itertools.zip_longest(ours.splitlines(), theirs.splitlines())
    for number, (our_line, their_line) in enumerate(lines, start=1):
        if our_line != their_line:
            theirs, ours = _where_they_part(their_line, our_line)
            raise UserError(
                f"{key}: another chat template: line {number} is {theirs}, the student's is {ours}; they must be the "
                "same, as its prompts are rendered by the student's"
            )


def _where_they_part(*lines: str | None) -> list[str]:
    """A few words of each from shortly before the first difference; None: there is no such line."""
    pairs = zip(*((line or "") for line in lines), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    start = max(0, same - 12)
    return ["absent" if line is None else repr(("..." if start else "") + line[start : same + 40]) for line in lines]


def _files_of(checkpoint: Path, key: str) -> list[StoredTensor]:
    """The files of a folder, each as one run of bytes."""
    files = sorted(file for file in checkpoint.glob("*") if file.is_file())
    if not files:
        raise UserError(f"{key}: {checkpoint} has no files; it must be a Megatron distributed checkpoint")
    sizes = [file.stat().st_size for file in files]
    return [StoredTensor(f, f.name, "file", (size,), 0, size) for f, size in zip(files, sizes, strict=True)]


def _weights_digest(stored: Iterable[StoredTensor], key: str) -> str:
    by_file = [list(group) for _, group in itertools.groupby(stored, key=lambda tensor: tensor.file)]
    with ThreadPoolExecutor(READERS) as readers:
        lines = itertools.chain(*readers.map(lambda tensors: _hash_tensors(tensors, key), by_file))
        return _digest(sorted(lines))


def _hash_tensors(tensors: list[StoredTensor], key: str) -> list[str]:
    """A line for each tensor of one file. Read, not mapped: a file that is cut meanwhile is an error, not a signal."""
    lines = []
    with tensors[0].file.open("rb", buffering=0) as opened:
        for tensor in tensors:
            digest = hashlib.sha256()
            for offset, size in _pages(tensor.size):
                page = os.pread(opened.fileno(), size, tensor.start + offset)
                if len(page) != size:
                    raise UserError(f"{key}: {tensor.file} was cut while it was read; copy the checkpoint again")
                digest.update(page)
            lines.append(f"{tensor.name} {tensor.dtype} {tensor.shape} {digest.hexdigest()}")
    return lines


def _pages(size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of what is hashed of `size` bytes."""
    count = max(MIN_PAGES, size // BYTES_PER_PAGE)
    if size <= count * PAGE_BYTES:
        return [(0, size)]
    return [(i * (size - PAGE_BYTES) // (count - 1), PAGE_BYTES) for i in range(count)]


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
