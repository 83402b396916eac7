"""The quickstart world: three domains, three effort levels, nine teachers, one student, on a laptop CPU.

Everything here is what a user of the project brings: prompt files, environment classes, Hugging Face-format checkpoint
folders and a YAML file. Nothing in `megatron_mopd` knows of it.
"""
