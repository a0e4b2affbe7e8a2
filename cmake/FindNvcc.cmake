# Finds a CUDA compiler: on PATH, in CUDACXX or CUDA_PATH, in the usual folder, or among the packages of
# PyPI in this Python. Enables the CUDA language if there is one.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)  # the module must load where there is no CUDA toolkit
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES OFF)     # each library names its own
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u, pathlib as p
s = u.find_spec('nvidia')
c = [n for r in (s.submodule_search_locations if s else []) for n in sorted(p.Path(r).glob('cu*/bin/nvcc'))]
print(c[-1] if c else '')"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nvcc_of_pypi)
  if(nvcc_of_pypi AND DEFINED ENV{JAX_FLASHATTN_NVCC_FROM_PYPI})
    set(nvcc "${nvcc_of_pypi}")
  else()
    find_program(nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(NOT nvcc)
      set(nvcc "${nvcc_of_pypi}")
    endif()
  endif()
  if(nvcc)
    set(ENV{CUDACXX} "${nvcc}")
    # PyPI's toolkit has lib/ where nvcc looks for lib64/.
    get_filename_component(toolkit "${nvcc}" DIRECTORY)
    get_filename_component(toolkit "${toolkit}" DIRECTORY)
    if(EXISTS "${toolkit}/lib/libcudart_static.a" AND NOT EXISTS "${toolkit}/lib64")
      set(ENV{LIBRARY_PATH} "${toolkit}/lib:$ENV{LIBRARY_PATH}")
      set(cuda_library_dir "${toolkit}/lib")
    endif()
  endif()
endif()

include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old; 12.8 or later is needed")
  endif()
endif()
