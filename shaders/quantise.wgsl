// Activations as int8: a scale for each row and block of 32, and whole codes of -127..127.

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
// Two vec4s a block: element 4j+i is byte i of word j.
@group(0) @binding(1) var<storage, read_write> codes: array<vec4<u32>>;
// Bits of (scale, scale * sum of the block's codes).
@group(0) @binding(2) var<storage, read_write> scales: array<vec2<u32>>;

struct Params {
    // Blocks of a row, also those of its stride.
    blocks: u32,
}
var<immediate> p: Params;

const NAN = 0x7fc00000u;

fn largest(v: vec4<f32>) -> f32 {
    let a = abs(v);
    return max(max(a.x, a.y), max(a.z, a.w));
}

// By bits, since drivers may take it that there is nothing to be found.
fn unbounded(v: vec4<f32>) -> bool {
    let exponents = bitcast<vec4<u32>>(v) & vec4<u32>(0x7f800000u);
    return any(exponents == vec4<u32>(0x7f800000u));
}

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let b = group.x * 32u + local.x;
    if (b >= p.blocks) {
        return;
    }
    let block = group.y * p.blocks + b;
    var top = 0.0;
    var bad = false;
@v    let v$ = x[8u * block + $u];
@v    top = max(top, largest(v$));
@v    bad = bad || unbounded(v$);
    let inverse = select(0.0, 127.0 / top, top > 0.0);
    var sum = 0;
@v    let c$ = vec4<i32>(clamp(round(v$ * inverse), vec4<f32>(-127.0), vec4<f32>(127.0)));
@v    sum += c$.x + c$.y + c$.z + c$.w;
@v    let u$ = vec4<u32>(c$) & vec4<u32>(255u);
@v    let w$ = u$.x | (u$.y << 8u) | (u$.z << 16u) | (u$.w << 24u);
    codes[2u * block] = vec4<u32>(w0, w1, w2, w3);
    codes[2u * block + 1u] = vec4<u32>(w4, w5, w6, w7);
    let scale = top / 127.0;
    let both = bitcast<vec2<u32>>(vec2<f32>(scale, scale * f32(sum)));
    scales[block] = select(both, vec2<u32>(NAN), bad);
}
