"""Faults of layers behind the first, put into a running vLLM; `Injector` in faults.py says when."""

WIDE = 1e6  # more than eight bits can hold
VALUE_FAULTS = ("nan_value", "wide_value")
KERNEL_WINDOW = 5


def install_value_faults(injector, backend=None) -> None:
    """Have values put into what the model's last layer hands to the cache for one token; `backend` is the class that stores it."""
    if backend is None:
        from vllm.v1.attention.backends import cpu_attn

        backend = cpu_attn.CPUAttentionBackendImpl
    update = backend.do_kv_cache_update

    def faulty_update(impl, layer, key, value, kv_cache, slots):
        if injector.in_flight and injector.in_flight[0][0] == layer.layer_name:
            value = value.clone()
            token = value[injector.in_flight.pop()[1]]
            if injector.fault == "nan_value":
                token[-1, 3] = float("nan")
            else:
                token.fill_(WIDE)
        return update(impl, layer, key, value, kv_cache, slots)

    backend.do_kv_cache_update = faulty_update


def install_kernel_window(backends, mark) -> None:
    """Have the kernels of these classes read five positions before a token, whatever their layers were made with."""
    marked = []

    def cut(forward):
        def faulty_forward(impl, layer, query, key, value, kv_cache, metadata, *args, **kwargs):
            own, impl.sliding_window = impl.sliding_window, (KERNEL_WINDOW, 0)
            if hasattr(metadata, "scheduler_metadata"):  # made for the window that the layer has
                metadata.scheduler_metadata = None
            try:
                return forward(impl, layer, query, key, value, kv_cache, metadata, *args, **kwargs)
            finally:
                impl.sliding_window = own
                if not marked and mark({"fault": "kernel_window", "request": -1}):
                    marked.append(True)

        return faulty_forward

    for backend in backends:
        backend.forward = cut(backend.forward)


class LayerFaults:
    """What an injector does to the model's last layer."""

    in_flight: list

    def late_layer(self, runner, fed, row, name, prefix, at, extend):
        """Change V of the model's last layer in all slots of a request's cached prefix, in every value."""
        blocks = runner.input_batch.block_table[0]
        if prefix < blocks.block_size:
            return None
        layer = runner.kv_cache_config.kv_cache_groups[0].layer_names[-1]
        kv = runner.compilation_config.static_forward_context[layer].kv_cache
        size, first = blocks.block_size, int(blocks.block_table.gpu[row, 0])
        for position in range(prefix):
            block = int(blocks.block_table.gpu[row, position // size])
            both = kv.view(kv.shape[0], kv.shape[1], 2 * size, kv.shape[3] // 2)[block]
            both[:, size + position % size] *= -1
        return {"group": 0, "slot": first * size, "count": size}

    def nan_value(self, runner, fed, row, name, prefix, at, extend):
        """Have the model's last layer hand NaN to the cache, in V of one token."""
        return self._bad_value(runner, at, prefix, extend)

    def wide_value(self, runner, fed, row, name, prefix, at, extend):
        """Have the model's last layer hand larger values to a cache of 8 bits than that can hold, as all V of one token."""
        return self._bad_value(runner, at, prefix, extend)

    def _bad_value(self, runner, at, prefix, extend):
        layers = runner.kv_cache_config.kv_cache_groups[0].layer_names
        self.in_flight = [(layers[-1], at + extend - 1)]
        return {"position": prefix + extend - 1, "layer": len(layers) - 1}
