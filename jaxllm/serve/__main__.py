"""python -m jaxllm.serve"""

# The engine process imports this module too, and needs none of the server.
if __name__ == "__main__":
    import sys

    from jaxllm.serve.run import main

    sys.exit(main())
