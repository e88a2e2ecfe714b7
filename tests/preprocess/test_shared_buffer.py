"""Memory that the workers of preprocessing share with their parent."""

import os

import numpy as np

from megatron.extras.preparation.preprocess.workers import SharedBuffer, create_memory_file


def test_objects_pass_in_both_directions_while_the_memory_grows() -> None:
    descriptor = create_memory_file()
    ours = SharedBuffer(descriptor)
    theirs = SharedBuffer(os.dup(descriptor))
    for megabytes in (0, 1, 20, 3, 50):
        size = megabytes << 20
        ids = np.arange(size // 2, dtype=np.uint16)[::2]
        sent = {"text": os.urandom(size), "ids": ids}
        found = theirs.load(ours.store(sent))
        assert found["text"] == sent["text"]
        # What was loaded is a copy, so that the next object does not change it.
        ours.store(b"\0" * size)
        assert np.array_equal(found["ids"], ids)
        assert found["ids"].flags.writeable
        # The answer is larger than what the other side has mapped.
        answer = bytes(size + (9 << 20))
        assert ours.load(theirs.store(answer)) == answer
    ours.close()
    theirs.close()
