"""Tests against packages that are no part of the environment, because transformers imports them wherever it finds them:
`make test` has them in a folder of their own. Without it nothing here is collected.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchao") else ["test_*"]
