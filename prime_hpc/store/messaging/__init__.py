"""Messages between the processes of a run, and files handed from one node to another, over authenticated sockets."""
