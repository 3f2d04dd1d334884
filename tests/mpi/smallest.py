"""`largebatch.train` with a ViT of 10,000 parameters, whose run folder is small enough for a fixture."""

import runpy
from functools import partial

import zoo
from largebatch import recipes
from zoo import vit

NAME = "vit_pico8"

if __name__ == "__main__":
    vit.STRUCTURES[NAME] = vit.Structure(8, embed_dim=16, depth=2, num_heads=2, timm_name="")
    zoo.MODELS[NAME] = partial(vit.build_vit, NAME)
    recipes.MODELS[NAME] = ""
    runpy.run_module("largebatch.train", run_name="__main__")
