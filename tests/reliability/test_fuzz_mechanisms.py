"""Some of the cases of :mod:`tests.reliability.fuzz_mechanisms`."""

from tests.reliability.fuzz_mechanisms import fuzz


def test_the_mechanisms_keep_to_their_equations_in_every_precision():
    _, failures = fuzz(150)
    assert not failures, "\n".join(failures)
