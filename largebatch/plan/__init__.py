"""Memory, hours and cost of a run before it starts.

    python -m largebatch.plan --gpus 200 --gpu a100 --model vit_b32
"""
