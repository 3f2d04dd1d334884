"""The classes of single images, prepared exactly as an evaluation prepares them.

    __main__.py    the command line: read images, compute probabilities, print the most likely classes
"""
