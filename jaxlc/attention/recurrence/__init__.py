"""Recurrent layers, such as the gated delta rule, over a sequence that is split across devices."""
