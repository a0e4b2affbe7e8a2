# The module `_cuda`: one object library per kernel and set of architectures, one translation unit per
# (kernel, head dim), all generated from cmake/instantiate.cu.in. A unit of its own for each dtype costs
# 4 seconds more of reading headers and compiling host code each.
set(CMAKE_CUDA_STANDARD 17)
set(generated "${CMAKE_CURRENT_BINARY_DIR}/generated")
file(MAKE_DIRECTORY "${generated}")

set(wgmma_header "${generated}/wgmma.cuh")
add_custom_command(
  OUTPUT "${wgmma_header}"
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/generate_wgmma.py" "${wgmma_header}"
  DEPENDS src/cuda/generate_wgmma.py VERBATIM)
add_custom_target(wgmma_header DEPENDS "${wgmma_header}")

list(JOIN DTYPES ", " dtypes)
list(JOIN HEAD_DIMS ", " head_dims)
list(JOIN BACKWARD_SM90_HEAD_DIMS ", " backward_sm90_head_dims)
list(JOIN GENERIC_HEAD_DIMS ", " generic_head_dims)
configure_file(cmake/instances.h.in "${generated}/instances.h")

set(kernel_objects)
# cuda_kernel(name PARAMS struct ARCHITECTURES list HEAD_DIMS list): instantiates launch_<name><T, HeadDim>;
# without HEAD_DIMS launch_<name><T>, in one unit.
function(cuda_kernel name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PARAMS" "ARCHITECTURES;HEAD_DIMS")
  set(sources)
  set(KERNEL ${name})
  if(NOT arg_HEAD_DIMS)
    set(arg_HEAD_DIMS ALL)
  endif()
  foreach(HEAD_DIM IN LISTS arg_HEAD_DIMS)
    if(HEAD_DIM STREQUAL ALL)
      set(unit ${name})
      set(head_dim_argument)
    else()
      set(unit ${name}_${HEAD_DIM})
      set(head_dim_argument ", ${HEAD_DIM}")
    endif()
    set(INSTANCES)
    foreach(DTYPE IN LISTS DTYPES)
      string(APPEND INSTANCES "template Status launch_${name}<${DTYPE}${head_dim_argument}>(const ${arg_PARAMS}&, "
                              "const Device&, cudaStream_t);\n")
    endforeach()
    set(source "${generated}/${unit}.cu")
    configure_file(cmake/instantiate.cu.in "${source}")
    list(APPEND sources "${source}")
  endforeach()
  add_library(${name} OBJECT ${sources})
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${arg_ARCHITECTURES}")
  target_include_directories(${name} PRIVATE src src/cuda "${generated}")
  target_compile_options(
    ${name} PRIVATE -O3 --expt-relaxed-constexpr --compress-mode=size -Xptxas=-v,--warn-on-spills)
  add_dependencies(${name} wgmma_header)
  set(kernel_objects ${kernel_objects} $<TARGET_OBJECTS:${name}> PARENT_SCOPE)
endfunction()

cuda_kernel(prefill_sm80 PARAMS PrefillParams ARCHITECTURES ${GENERIC_ARCHITECTURES} HEAD_DIMS ${GENERIC_HEAD_DIMS})
cuda_kernel(prefill_sm90 PARAMS PrefillParams ARCHITECTURES ${HOPPER_ARCHITECTURES} HEAD_DIMS ${HEAD_DIMS})
cuda_kernel(backward_sm80 PARAMS BackwardParams ARCHITECTURES ${GENERIC_ARCHITECTURES} HEAD_DIMS ${GENERIC_HEAD_DIMS})
cuda_kernel(backward_sm90 PARAMS BackwardParams ARCHITECTURES ${HOPPER_ARCHITECTURES} HEAD_DIMS ${BACKWARD_SM90_HEAD_DIMS})
cuda_kernel(decode PARAMS DecodeParams ARCHITECTURES ${GENERIC_ARCHITECTURES} HEAD_DIMS ${GENERIC_HEAD_DIMS})
cuda_kernel(decode_combine PARAMS DecodeArgs ARCHITECTURES ${GENERIC_ARCHITECTURES})
cuda_kernel(decode_latent_sm90 PARAMS DecodeParams ARCHITECTURES ${HOPPER_ARCHITECTURES} HEAD_DIMS 576)

# Tests of the Hopper building blocks.
add_library(selftest OBJECT src/cuda/selftest.cu)
set_target_properties(selftest PROPERTIES CUDA_ARCHITECTURES "${HOPPER_ARCHITECTURES}")
target_include_directories(selftest PRIVATE src src/cuda "${generated}")
target_compile_options(selftest PRIVATE --expt-relaxed-constexpr --compress-mode=size)
add_dependencies(selftest wgmma_header)
list(APPEND kernel_objects $<TARGET_OBJECTS:selftest>)

extension_module(_cuda src/cuda/module.cc src/cuda/launch.cc src/cuda/explain.cc
                 src/cuda/device.cc ${kernel_objects})
target_include_directories(_cuda PRIVATE "${generated}")
target_include_directories(_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_options(_cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>)
if(cuda_library_dir)
  target_link_directories(_cuda PRIVATE "${cuda_library_dir}")
endif()
set_target_properties(_cuda PROPERTIES CUDA_ARCHITECTURES 80)
target_link_libraries(_cuda PRIVATE cudart_static rt dl)
