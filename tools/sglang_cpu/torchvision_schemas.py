"""Let PyPI's torchvision import beside a CPU build of torch: `python torchvision_schemas.py` in that environment.

PyPI's x86_64 torchvision is compiled for CUDA; its library does not load without it, and then its own Python fails on
the first operator that it describes (`_meta_registrations.py`: nms, qnms). Transformers and SGLang import torchvision
for images, which no model of this project has. Two schemas without code are all that the import needs; to call one
still raises.
"""

import importlib.util
from pathlib import Path

MARK = "\n# Appended by torchvision_schemas.py"
SCHEMAS = """
if not _has_ops():
    _schemas = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _schemas.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    package = importlib.util.find_spec("torchvision")  # does not import it
    assert package is not None, "torchvision is not installed"
    assert package.origin is not None, "torchvision has no files"
    extension = Path(package.origin).with_name("extension.py")
    source, _, _earlier = extension.read_text(encoding="utf-8").partition(MARK)
    extension.write_text(source + MARK + SCHEMAS, encoding="utf-8")


if __name__ == "__main__":
    main()
