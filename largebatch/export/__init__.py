"""Trained models for others: python -m largebatch.export. No Horovod and no data are needed.

    __main__.py    the command line
    folder.py      a folder that timm and the Hugging Face hub take, with a model card
    graph.py       ONNX and torch.export: the model as a graph, for any batch size, checked
"""
