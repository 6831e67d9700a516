"""python -m jaxllm.serve.ray"""

# Engine processes import this module too, and need none of it.
if __name__ == "__main__":
    import sys

    from jaxllm.serve.ray.application import main

    sys.exit(main())
