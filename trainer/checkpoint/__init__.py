"""Checkpoints: staged, written beside in the background, checksummed, renamed, then pointed at.

    checkpoints/
        .saving-step-00000100/   while it is written; what a crash leaves behind is never read
        step-00000100/           complete: shards and metadata of torch's distributed checkpoint,
                                 trainer.json (how far the run was), and manifest.json, written last:
                                 the size and SHA-256 of every other file
        latest                   the name of the newest complete one

Any number of ranks can read what any other number wrote. Nothing that is read is executed.
"""
