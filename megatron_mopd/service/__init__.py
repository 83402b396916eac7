"""The Megatron teacher service as seen from outside Megatron: its wire format, its queue and HTTP front, its client.

Torch-free. What computes is `megatron_mopd/mcore/serve_teacher.py`. See docs/teacher_service.md.
"""
