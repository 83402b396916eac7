"""The one exception that a user sees as a line of text.

Promise: every command prints a UserError as one line on stderr and ends with exit code 2. Anything else is a defect of
this project and keeps its traceback.
"""


class UserError(ValueError):
    """Bad input. The message says what is wrong and what to change, in one line, also where it quotes longer ones."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines() if line.strip()))
