"""The yardstick: the same model and optimizer in plain JAX, dictionaries and one function each.

No mesh, no ramp, no features. Shapes as in maxramp/model.py.
"""

import jax
import jax.numpy as jnp


def init(key, *, D, H, K, h, F, V, L):
    """Makes weights as a dictionary; those of the layers have a leading axis L."""
    keys = iter(jax.random.split(key, 9))

    def normal(*shape, scale):
        return jax.random.normal(next(keys), shape, jnp.float32) * scale

    layers = {
        "attention_norm": jnp.ones((L, D)),
        "query": normal(L, D, H, h, scale=D**-0.5),
        "key": normal(L, D, K, h, scale=D**-0.5),
        "value": normal(L, D, K, h, scale=D**-0.5),
        "out": normal(L, H, h, D, scale=(H * h) ** -0.5),
        "mlp_norm": jnp.ones((L, D)),
        "gate": normal(L, D, F, scale=D**-0.5),
        "up": normal(L, D, F, scale=D**-0.5),
        "down": normal(L, F, D, scale=F**-0.5),
    }
    embedding = normal(V, D, scale=D**-0.5)
    return {"embedding": embedding, "layers": layers, "norm": jnp.ones(D), "head": embedding.T + 0}


def _norm(x, scale):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def _rotate(x, cos, sin):
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def loss_sum(params, tokens, dtype):
    """Cross-entropy summed over the tokens of [B, T + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    T = inputs.shape[1]
    H, h = params["layers"]["query"].shape[2:]
    K = params["layers"]["key"].shape[2]
    angle = jnp.arange(T)[:, None] / 10000.0 ** (jnp.arange(0, h, 2) / h)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    mask = jnp.tril(jnp.ones((T, T), bool))

    def layer(x, p):
        p = {name: w.astype(dtype) if w.ndim > 1 else w for name, w in p.items()}
        y = _norm(x, p["attention_norm"])
        q = _rotate(jnp.einsum("btd,dnh->btnh", y, p["query"]), cos, sin)
        k = _rotate(jnp.einsum("btd,dnh->btnh", y, p["key"]), cos, sin)
        v = jnp.einsum("btd,dnh->btnh", y, p["value"])
        q = q.reshape(*q.shape[:2], K, H // K, h) * h**-0.5
        s = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
        s = jax.nn.softmax(jnp.where(mask, s, jnp.finfo(jnp.float32).min), -1).astype(dtype)
        a = jnp.einsum("bkgts,bskh->btkgh", s, v).reshape(*x.shape[:2], H, h)
        x = x + jnp.einsum("btnh,nhd->btd", a, p["out"])
        y = _norm(x, p["mlp_norm"])
        gate, up = jnp.einsum("btd,df->btf", y, p["gate"]), jnp.einsum("btd,df->btf", y, p["up"])
        return x + jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, p["down"]), None

    x = params["embedding"].astype(dtype)[inputs]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = _norm(x, params["norm"])
    logits = jnp.einsum(
        "btd,dv->btv", x, params["head"].astype(dtype), preferred_element_type=jnp.float32
    )
    return (
        jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    ).sum()


def step(params, mu, nu, count, batch, *, dtype, rate):
    """Makes one AdamW step with clipping at 1 on a batch [A, B, T + 1]."""
    tokens = batch[:, :, 1:].size

    def add(sums, rows):
        loss, grads = jax.value_and_grad(loss_sum)(params, rows, dtype)
        return jax.tree.map(jnp.add, sums, (loss, grads)), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(add, zeros, batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))) / tokens
    scale = jnp.where(norm > 1, 1 / norm, 1) / tokens
    grads = jax.tree.map(lambda g: g * scale, grads)
    count = count + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g * g, nu, grads)
    params = jax.tree.map(
        lambda p, m, n: (
            p - rate * (m / (1 - 0.9**count) / (jnp.sqrt(n / (1 - 0.95**count)) + 1e-8) + 0.1 * p)
        ),
        params,
        mu,
        nu,
    )
    return params, mu, nu, count, {"loss": loss / tokens, "grad_norm": norm}
