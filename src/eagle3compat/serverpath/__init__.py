"""The server path: speculators 0.5 and later extract through a vLLM server, and a file for each request.

`facts` reads from source what decides whether a pair works, `verdict` says so, `elsewhere` asks another environment.
"""
