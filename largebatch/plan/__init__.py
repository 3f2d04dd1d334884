"""Memory, hours and cost of a run before it starts.

    python -m largebatch.plan --gpus 200 --gpu a100 --model vit_b32

    constants   devices, links, and every other number, with its source
    trace       a pass forward and backward, counted on the meta device
    meta        operations on the meta device, quickly
    memory      memory of a rank by part; the largest micro-batch
    step        time of a step by part, in closed form
    run         hours, input, checkpoints, failures
    planning    all of these for a config on a cluster
    calibrate   the speed of a device from a benchmark's table
    beforehand  the lines at the start of a run
    search      ways to share the model among ranks
    simulate    a step event by event
    validation  predictions beside published and measured runs
    text        a plan as a table and as JSON
    picture     pictures
"""
