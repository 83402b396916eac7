"""The K3 miniature: from a cold start over nine reinforcement-learning teachers to one student, on a laptop CPU.

    world          prompts, demonstrations, tokenizer, a random Qwen3-MoE          world.py
    cold start     SFT on noisy demonstrations                                     sft.yaml
    nine teachers  in each domain one run of GRPO after the other: max, high, low  rl.yaml
    one student    multi-teacher on-policy distillation                            mopd.yaml

Tasks, vocabulary and model are those of `examples/quickstart`, whose teachers learn from demonstrations instead.
"""
