"""The gated delta rule: linear attention with a recurrent state, over a sequence that is split
across devices.
"""
