# Python and torch are asked where they are; find_package(Torch) would want a CUDA toolkit beside a CUDA
# torch and sets flags of its own.
macro(vl_find_python)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
endmacro()

function(vl_ask_python variable code what)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${code}" OUTPUT_VARIABLE answer
                  ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${what} is not installed for ${Python_EXECUTABLE}: run "
                        "'pip install -r requirements/cpu.txt' first, or let 'pip install .' fetch it.")
  endif()
  set(${variable} ${answer} PARENT_SCOPE)
endfunction()

# vl_torch_module(<name> <source>...): a plain shared library for torch.ops.load_library. The stable ABI
# (from torch 2.11) keeps one binary good for CPU torch and CUDA torch of every later release.
function(vl_torch_module name)
  # find_spec instead of import: importing torch takes seconds.
  vl_ask_python(TORCH_DIR
    "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])" torch)
  add_library(${name} MODULE ${ARGN})
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".so")
  target_compile_definitions(${name} PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)
  target_include_directories(${name} SYSTEM PRIVATE ${TORCH_DIR}/include)
  target_link_directories(${name} PRIVATE ${TORCH_DIR}/lib)
  target_link_libraries(${name} PRIVATE torch_cpu)
endfunction()
