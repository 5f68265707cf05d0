// Copies whole blocks within a store, whatever they hold: a block is a multiple of 16 bytes. No pair's source or target is another pair's target.

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read_write> keys: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> values: array<vec4<u32>>;

struct Params {
    // Arena offset of pairs (from, to).
    pairs: u32,
    // vec4s of a block.
    block: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let i = group.x * 32u + local.x;
    if (i < p.block) {
        let origin = arena[p.pairs + 2u * group.y] * p.block + i;
        let to = arena[p.pairs + 2u * group.y + 1u] * p.block + i;
        keys[to] = keys[origin];
        values[to] = values[origin];
    }
}
