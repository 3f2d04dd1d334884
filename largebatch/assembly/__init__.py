"""From a config to a run that can start: the only place that assembles the parts.

Every rank builds the same from the config and the seed; then all get the state of rank 0, fresh or resumed. Work that
can fail on one rank alone is done inside `comm.together`, so that all ranks stop with the cause.
"""

from largebatch.assembly.images import (
    Images,
    build_augment,
    build_eval_loader,
    build_plan,
    check_batch,
    check_model,
    classes_of_run,
    count_passes,
    images_of,
    model_geometry,
    open_data,
    open_held_out,
    open_images,
    open_train_loader,
    refuse_lone_image,
    sizes_of,
    train_batches,
    warn_of_few_statistics,
    warn_of_large_batch,
    with_classes,
)
from largebatch.assembly.replica import (
    build_model,
    build_objective,
    build_optimizer,
    build_replica,
    build_sam,
    divides,
    lamb_impl,
    peak_lr,
)
from largebatch.assembly.trainer import (
    assemble,
    build_average,
    build_learning_rate,
    build_noise_scale,
    build_schedule,
    build_trainer,
    put_together,
    set_half_life,
)

__all__ = [
    "Images", "assemble", "build_augment", "build_average", "build_eval_loader", "build_learning_rate", "build_model",
    "build_noise_scale", "build_objective", "build_optimizer", "build_plan", "build_replica", "build_sam",
    "build_schedule", "build_trainer", "check_batch", "check_model", "classes_of_run", "count_passes", "divides",
    "images_of", "lamb_impl", "model_geometry", "open_data", "open_held_out", "open_images", "open_train_loader",
    "peak_lr", "put_together", "refuse_lone_image", "set_half_life", "sizes_of", "train_batches",
    "warn_of_few_statistics", "warn_of_large_batch", "with_classes",
]  # fmt: skip
