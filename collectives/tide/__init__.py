"""TIDE: all-gather into parameter storage, reduce-scatter out of gradients, no flat buffers between.

Our reading of an idea whose authors call it zero-copy collectives: the layout of the parameters
becomes addressing inside the collective, so nothing is copied in or out.
"""
