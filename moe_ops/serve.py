"""Serve a mixture-of-experts model with transformers' OpenAI-compatible server.

    python -m moe_ops.serve MODEL [--scheme int4_w4a16] [--gpu-memory 12GiB] [--port 8000]

docs/serving.md says what it sets and what the server does. Options that are not this command's are
those of `transformers serve`.
"""

from moe_ops.integrations.transformers.serving import main

if __name__ == "__main__":
    main()
