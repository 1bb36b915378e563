//! Runs a compiled model on ones and prints its outputs.
//!
//!     cargo run --release -- path/to/vit.so [SHAPE of each input, such as 4x3x224x224]

mod gtco;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = run(&arguments) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run(arguments: &[String]) -> Result<(), String> {
    let (path, texts) = arguments.split_first().ok_or("usage: run MODEL.so [SHAPE ...]")?;
    let mut model = gtco::Model::open(path)?;
    if !texts.is_empty() {
        let shapes: Result<Vec<Vec<i64>>, String> = texts.iter().map(|text| shape_of(text)).collect();
        model.set_shapes(&shapes?)?;
    }
    let ones = |tensors: Vec<&gtco::TensorInfo>| -> Vec<Vec<f32>> {
        tensors.iter().map(|tensor| vec![1.0; tensor.nbytes as usize / 4]).collect()
    };
    let inputs = ones(model.inputs()?);
    let mut outputs = ones(model.outputs()?);
    let views: Vec<&[f32]> = inputs.iter().map(|values| values.as_slice()).collect();
    model.run(&views, &mut outputs)?;
    for (tensor, values) in model.outputs()?.iter().zip(&outputs) {
        let shown: Vec<String> = values.iter().take(5).map(|value| value.to_string()).collect();
        let rest = if values.len() > 5 { " ..." } else { "" };
        println!("{} {:?} = {}{rest}", tensor.name(), tensor.dims(), shown.join(" "));
    }
    Ok(())
}

fn shape_of(text: &str) -> Result<Vec<i64>, String> {
    let sizes: Result<Vec<i64>, _> = text.split('x').map(str::parse).collect();
    sizes.map_err(|_| format!("'{text}' is no shape such as 4x3x224x224"))
}
