"""Text generation with a KV cache that is split over the context and tensor axes.

prompts -> prefill, chunk by chunk -> logits -> choice of a token -> decoding step -> ...
`jaxlc.generate` is the public function.
"""

import jaxlc.runtime.stderr  # noqa: F401  imports JAX without the notes of its CUDA plugin
