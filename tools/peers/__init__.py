"""What tools/compare_peers, tools/start_up and tools/random_model are made of.

One file a peer (`dunlin`, `llama`, `vllm`, `openvino`, `mistralrs`), each a `Peer` as `peer.py`
describes it; `system` holds processes and what the machine is; `measure` measures one peer;
`report` makes the table. Only the standard library is used here: what a peer needs is installed
into its own folder below target/peers.
"""
