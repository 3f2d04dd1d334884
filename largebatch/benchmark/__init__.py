"""Speed beside what a user would otherwise use: `python -m largebatch.benchmark optimizer | loader | step | model`.

`measure` is the instrument; each of the other files sets up what is compared. NOTES.md says what the limits were found
to be and what was tried against them.
"""
