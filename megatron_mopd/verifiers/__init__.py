"""Program checkers for verifiable rewards (protocols.Verifier), and the environment that asks one after a single turn.

| name         | the student ends with | label of the prompt                                   | module          |
|--------------|-----------------------|-------------------------------------------------------|-----------------|
| answer_match | text                  | the answer, or a list of answers that are all correct | `answer.py`     |
| unit_tests   | a program             | a list of [stdin, expected stdout]                    | `unit_tests.py` |
| state_check  | a state               | {path: expected value}                                | `state.py`      |

    environments:
      arithmetic:
        factory: megatron_mopd.verifiers.environment:VerifiedTurn
        options: {verifier: answer_match, verifier_options: {compare: number}}

Another verifier is named by its class, `package.module:Class`.
"""
