// A model that gtco compiled, through its C interface. Copy this file and a library's header, as
// model.h, into your package: all headers declare the same.
//
// A Model runs one call at a time. Open one for each goroutine; models of one file share the weights.
package main

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>
#include "model.h"

#define FUNCTION(name) ((__typeof__(&name))dlsym(library, #name))
static int is_model(void* library) { return FUNCTION(gtco_open) && FUNCTION(gtco_sized_input); }
static gtco_status open_model(void* library, gtco_model** model) { return FUNCTION(gtco_open)(NULL, model); }
static void close_model(void* library, gtco_model* model) { FUNCTION(gtco_close)(model); }
static const char* last_error(void* library, gtco_model* model) { return FUNCTION(gtco_last_error)(model); }
static int count(void* library, gtco_model* model, int outputs) {
  return outputs ? FUNCTION(gtco_num_outputs)(model) : FUNCTION(gtco_num_inputs)(model);
}
static const gtco_tensor_info* sized(void* library, gtco_model* model, int output, int index) {
  return output ? FUNCTION(gtco_sized_output)(model, index) : FUNCTION(gtco_sized_input)(model, index);
}
static int axes(void* library, gtco_model* model, int index) { return FUNCTION(gtco_input)(model, index)->ndim; }
static gtco_status set_shapes(void* library, gtco_model* model, void** shapes) {
  return FUNCTION(gtco_set_shapes)(model, (const int64_t* const*)shapes);
}
static gtco_status run(void* library, gtco_model* model, void** inputs, void** outputs) {
  return FUNCTION(gtco_run)(model, (const void* const*)inputs, outputs);
}
*/
import "C"

import (
	"errors"
	"runtime"
	"unsafe"
)

// Tensor is an input or an output. Values lie in C's memory, where the model uses them in place.
type Tensor struct {
	Name   string
	Shape  []int64
	Values []float32
}

type Model struct {
	Inputs, Outputs []Tensor // empty until SetShapes, of a model of several shapes
	library         unsafe.Pointer
	handle          *C.gtco_model
	places          [2]*unsafe.Pointer // of Inputs and Outputs, as C takes them
}

// Open opens the library of a model.
func Open(path string) (*Model, error) {
	runtime.LockOSThread() // dlerror and gtco_last_error(NULL) are of a thread
	defer runtime.UnlockOSThread()
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	library := C.dlopen(name, C.RTLD_NOW|C.RTLD_LOCAL)
	if library == nil {
		return nil, errors.New(C.GoString(C.dlerror()))
	}
	if C.is_model(library) == 0 {
		return nil, errors.New(path + " is no model of gtco's")
	}
	model := &Model{library: library}
	if C.open_model(library, &model.handle) != C.GTCO_OK {
		return nil, errors.New(C.GoString(C.last_error(library, nil)))
	}
	if C.sized(library, model.handle, 0, 0) == nil {
		return model, nil
	}
	return model, model.allocate()
}

// Close frees the model and its tensors.
func (m *Model) Close() { m.free(); C.close_model(m.library, m.handle) }

// SetShapes chooses the shape of each input of the next runs, and makes Inputs and Outputs anew.
func (m *Model) SetShapes(shapes [][]int64) error {
	if len(shapes) != int(C.count(m.library, m.handle, 0)) {
		return errors.New("give a shape for each input")
	}
	table := array(len(shapes))
	defer C.free(unsafe.Pointer(table))
	for i, shape := range shapes {
		if len(shape) != int(C.axes(m.library, m.handle, C.int(i))) {
			return errors.New("a shape has another number of axes than its input")
		}
		sizes := C.malloc(C.size_t(8*len(shape) + 8))
		defer C.free(sizes)
		copy(unsafe.Slice((*int64)(sizes), len(shape)), shape)
		unsafe.Slice(table, len(shapes))[i] = sizes
	}
	if err := m.check(C.set_shapes(m.library, m.handle, table)); err != nil {
		return err
	}
	return m.allocate()
}

// Run computes Outputs from Inputs.
func (m *Model) Run() error {
	if m.places[0] == nil {
		return errors.New("the model was compiled for several shapes: give one with SetShapes")
	}
	return m.check(C.run(m.library, m.handle, m.places[0], m.places[1]))
}

func (m *Model) allocate() error {
	m.free()
	for side, tensors := range []*[]Tensor{&m.Inputs, &m.Outputs} {
		number := int(C.count(m.library, m.handle, C.int(side)))
		*tensors, m.places[side] = nil, array(number)
		for i := 0; i < number; i++ {
			info := C.sized(m.library, m.handle, C.int(side), C.int(i))
			if info.dtype != C.GTCO_FLOAT32 {
				return errors.New(C.GoString(info.name) + " is not float32, which this file is for")
			}
			place := C.aligned_alloc(64, (C.size_t(info.nbytes)+64)/64*64)
			unsafe.Slice(m.places[side], number)[i] = place
			shape := append([]int64{}, unsafe.Slice((*int64)(unsafe.Pointer(info.dims)), int(info.ndim))...)
			values := unsafe.Slice((*float32)(place), int(info.nbytes)/4)
			*tensors = append(*tensors, Tensor{C.GoString(info.name), shape, values})
		}
	}
	return nil
}

func (m *Model) free() {
	for side, tensors := range [][]Tensor{m.Inputs, m.Outputs} {
		for i := range tensors {
			C.free(unsafe.Slice(m.places[side], len(tensors))[i])
		}
		C.free(unsafe.Pointer(m.places[side]))
		m.places[side] = nil
	}
	m.Inputs, m.Outputs = nil, nil
}

func (m *Model) check(status C.gtco_status) error {
	if status == C.GTCO_OK {
		return nil
	}
	return errors.New(C.GoString(C.last_error(m.library, m.handle)))
}

// array is C's memory for so many pointers.
func array(length int) *unsafe.Pointer { return (*unsafe.Pointer)(C.calloc(C.size_t(length+1), 8)) }
