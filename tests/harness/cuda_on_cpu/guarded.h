// How the functions for ctypes report: nullptr or, until the next call, the sentence of the exception.
#pragma once

#include <exception>
#include <string>

template <class F>
const char* guarded(const F& f) {
  static std::string message;
  try {
    f();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
