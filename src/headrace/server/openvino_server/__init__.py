"""A server for OpenVINO GenAI, which has none of its own: the program that an upstream of kind `openvino` starts.

    python -m headrace.server.openvino_server MODEL [--device GPU.0] [--max-num-seqs 16] ...

It answers completions and chats of the OpenAI API, for one model. Tenants, limits, caches and every other feature stay
in the gateway, which is its only client.
"""
