// What happens to each element alone. Rows are padded with zeros to whole vec4s, and every op here
// keeps zeros; so a tensor is one run of vec4s.

@group(0) @binding(0) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> x: array<vec4<f32>>;

struct Params {
    count: u32,
    // Threads of the whole dispatch: each takes every `step`th element.
    step: u32,
}
var<immediate> p: Params;

fn silu(g: f32) -> f32 {
    return g * sigmoid(g);
}

// 0.5 g (1 + tanh(u)) = g sigmoid(2u), u = sqrt(2/pi) (g + 0.044715 g^3)
fn gelu(g: f32) -> f32 {
    return g * sigmoid(1.5957691216057308 * fma(0.044715 * g * g, g, g));
}

@compute @workgroup_size(32)
fn add(@builtin(global_invocation_id) id: vec3<u32>) {
    for (var i = id.x; i < p.count; i += p.step) {
        x[i] += y[i];
    }
}

@compute @workgroup_size(32)
fn gated_silu(@builtin(global_invocation_id) id: vec3<u32>) {
    for (var i = id.x; i < p.count; i += p.step) {
        let g = x[i];
        x[i] = vec4<f32>(silu(g.x), silu(g.y), silu(g.z), silu(g.w)) * y[i];
    }
}

@compute @workgroup_size(32)
fn gated_gelu(@builtin(global_invocation_id) id: vec3<u32>) {
    for (var i = id.x; i < p.count; i += p.step) {
        let g = x[i];
        x[i] = vec4<f32>(gelu(g.x), gelu(g.y), gelu(g.z), gelu(g.w)) * y[i];
    }
}

@compute @workgroup_size(32)
fn clear(@builtin(global_invocation_id) id: vec3<u32>) {
    for (var i = id.x; i < p.count; i += p.step) {
        x[i] = vec4<f32>(0.0);
    }
}
