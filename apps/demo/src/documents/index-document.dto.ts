import { IsNotEmpty, IsString, MaxLength } from 'class-validator';

/** Payload of `document.index`. */
export class IndexDocumentDto {
  /** The folder that is indexed, absolute. */
  @IsString()
  @IsNotEmpty()
  @MaxLength(4096)
  root: string;

  /** The file, relative to it. */
  @IsString()
  @IsNotEmpty()
  @MaxLength(4096)
  path: string;
}
