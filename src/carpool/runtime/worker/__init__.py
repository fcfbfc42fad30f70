"""Worker process: runs one rank of one job on one device under the executor's messages."""
