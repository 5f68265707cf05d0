alias Kept = vec4<f32>;
const STRIDE = DIM4;

fn kept(v: vec4<f32>) -> Kept {
    return v;
}

fn floats(k: Kept) -> vec4<f32> {
    return k;
}
