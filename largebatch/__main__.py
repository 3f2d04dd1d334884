"""The programs of largebatch; each has a --help of its own.

    python -m largebatch.train       train a model, or go on with a run
    python -m largebatch.validate    accuracy of a run or of a weights file
    python -m largebatch.pack        images into TFRecords; check them; label maps of a teacher
    python -m largebatch.doctor      check the installation, a host, or several hosts before a job
    python -m largebatch.report      the first difference between two runs
    python -m largebatch.benchmark   our speed beside timm's and torch's
"""

if __name__ == "__main__":
    print((__doc__ or "").strip())
