"""A service that speaks the protocol of the `tinker` client: its users train adapters of one frozen model step by step.

wire.py       the client's protobuf messages, read and written
requests.py   the client's JSON requests, checked
batches.py    its data as rank batches, and losses by the client's names
paths.py      `tinker://` paths: where what was saved lies, and what is known of it
adapter.py    one adapter in training, on every rank: gradients, Adam, save, load
board.py      between the event loop and the ranks: operations in order, one adapter fairly after the other
worker.py     the loop of the ranks: rank 0 decides, all obey
engines.py    sampling: adapters brought into the engines as they are asked for
sessions.py   records of clients, samplers and results
service.py    sessions, adapters, samplers and futures: what the routes do
address.py    where it listens, and the file that says so
app.py        the routes, behind the key
"""
