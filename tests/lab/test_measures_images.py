"""The keys of a pixel in models of images."""

from polyformer.attention.patterns import Full, Local1D, Local2D
from polyformer_lab.measures.scores import keys


def test_keys_are_counted_as_a_decoder_sees_them():
    assert keys(Full(), 12) == 6.5
    assert keys(Local1D(4, 0), 12) == 2.5
    assert keys(Local2D((3, 4), (3, 4), (0, 0, 0)), 12) == 6.5
