//! A model that gtco compiled, through its C interface (vit.h). Copy this file into your crate.
//!
//! A model runs one call at a time, so `run` takes `&mut self`. Open one for each thread: models of
//! one file share the weights' memory.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr::null;

extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

const RTLD_NOW: c_int = 2;

/// `gtco_tensor_info`; a size is -1 if it differs between the shapes of the model.
#[repr(C)]
pub struct TensorInfo {
    name: *const c_char,
    pub dtype: c_int,
    ndim: i32,
    dims: *const i64,
    symbols: *const *const c_char,
    pub nbytes: i64,
}

impl TensorInfo {
    pub fn name(&self) -> String {
        text(self.name)
    }

    pub fn dims(&self) -> &[i64] {
        if self.ndim == 0 {
            return &[];
        }
        unsafe { std::slice::from_raw_parts(self.dims, self.ndim as usize) }
    }
}

type Handle = *mut c_void;

pub struct Model {
    library: *mut c_void,
    handle: Handle,
}

// The handle may move to another thread; two threads may not use it at once, which &mut rules out.
unsafe impl Send for Model {}

impl Model {
    /// Opens the library; `Err` says why not.
    pub fn open(path: &str) -> Result<Model, String> {
        let name = CString::new(path).map_err(|error| error.to_string())?;
        let library = unsafe { dlopen(name.as_ptr(), RTLD_NOW) };
        if library.is_null() {
            return Err(text(unsafe { dlerror() }));
        }
        let mut model = Model { library, handle: std::ptr::null_mut() };
        let open: extern "C" fn(*const c_void, *mut Handle) -> c_int = model.function("gtco_open")?;
        match open(null(), &mut model.handle) {
            0 => Ok(model),
            _ => Err(model.last_error()),
        }
    }

    /// The inputs, with the sizes that `set_shapes` chose.
    pub fn inputs(&self) -> Result<Vec<&TensorInfo>, String> {
        self.tensors("gtco_num_inputs", "gtco_sized_input")
    }

    pub fn outputs(&self) -> Result<Vec<&TensorInfo>, String> {
        self.tensors("gtco_num_outputs", "gtco_sized_output")
    }

    /// Chooses the shape of each input of the next runs, of a model of several shapes.
    pub fn set_shapes(&mut self, shapes: &[Vec<i64>]) -> Result<(), String> {
        let known = self.tensors("gtco_num_inputs", "gtco_input")?;
        if known.len() != shapes.len() || known.iter().zip(shapes).any(|(i, s)| i.dims().len() != s.len()) {
            return Err("give a shape for each input, with all of its axes".into());
        }
        let sizes: Vec<*const i64> = shapes.iter().map(|shape| shape.as_ptr()).collect();
        let set: extern "C" fn(Handle, *const *const i64) -> c_int = self.function("gtco_set_shapes")?;
        self.check(set(self.handle, sizes.as_ptr()))
    }

    /// Runs the model. Inputs and outputs are in the model's order, each as long as its `nbytes`.
    pub fn run(&mut self, inputs: &[&[f32]], outputs: &mut [Vec<f32>]) -> Result<(), String> {
        let fits = |known: Vec<&TensorInfo>, given: Vec<usize>| {
            known.iter().map(|t| (t.dtype, t.nbytes as usize)).eq(given.iter().map(|n| (0, 4 * n)))
        };
        let (ins, outs) = (inputs.iter().map(|x| x.len()), outputs.iter().map(|y| y.len()));
        if !fits(self.inputs()?, ins.collect()) || !fits(self.outputs()?, outs.collect()) {
            return Err("an input or output is not float32, or has another size than the model's".into());
        }
        let ins: Vec<*const f32> = inputs.iter().map(|x| x.as_ptr()).collect();
        let mut outs: Vec<*mut f32> = outputs.iter_mut().map(|y| y.as_mut_ptr()).collect();
        let run: extern "C" fn(Handle, *const *const f32, *mut *mut f32) -> c_int = self.function("gtco_run")?;
        self.check(run(self.handle, ins.as_ptr(), outs.as_mut_ptr()))
    }

    fn tensors(&self, count: &str, get: &str) -> Result<Vec<&TensorInfo>, String> {
        let count: extern "C" fn(Handle) -> c_int = self.function(count)?;
        let get: extern "C" fn(Handle, c_int) -> *const TensorInfo = self.function(get)?;
        let found = (0..count(self.handle)).map(|i| unsafe { get(self.handle, i).as_ref() });
        found.collect::<Option<_>>().ok_or("the model was compiled for several shapes: give one".into())
    }

    /// The library's function of that name. `F` is its type in vit.h.
    fn function<F: Copy>(&self, name: &str) -> Result<F, String> {
        let symbol = CString::new(name).unwrap();
        let found = unsafe { dlsym(self.library, symbol.as_ptr()) };
        if found.is_null() {
            return Err(format!("this is no model of gtco's: it has no {name}"));
        }
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
    }

    fn check(&self, status: c_int) -> Result<(), String> {
        if status == 0 { Ok(()) } else { Err(self.last_error()) }
    }

    fn last_error(&self) -> String {
        let last: Result<extern "C" fn(Handle) -> *const c_char, _> = self.function("gtco_last_error");
        last.map_or_else(|why| why, |last| text(last(self.handle)))
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let close: Result<extern "C" fn(Handle), _> = self.function("gtco_close");
        if let (Ok(close), false) = (close, self.handle.is_null()) {
            close(self.handle);
        }
    }
}

fn text(words: *const c_char) -> String {
    if words.is_null() {
        return String::new();
    }
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}
