"""`eagle3compat serve`: what speculators 0.5 to 0.9 ask of a vLLM server, on a vLLM whose own server cannot answer it.

In the order of a request:

arguments  the stock launcher's arguments, and what they amount to
command    the process: socket, engine, web server, and their end
app        the endpoints
chat       text and conversations as token ids
images     conversations with images, by vLLM's own input processing
batches    concurrent requests in one engine run, and a file for each
extractor  vLLM's engine, with this library's capture
files      a file under its name only when it is whole
"""
